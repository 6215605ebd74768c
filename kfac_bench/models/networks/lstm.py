"""An LSTM language model in torch's own modules: Embedding, LSTM and Linear."""

from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """An embedding, `layers` LSTM layers of `width` units, and a linear layer to the logits.

    It maps int64 [n, L], of any L, to logits [n, L, symbols]. Each window starts with a hidden
    state and a cell state of zero. Weights are drawn from torch's global generator, as torch does
    for the three modules. Only the bias of the forget gates differs: it starts at 1, so that cells
    keep their content at first (Jozefowicz et al. 2015).
    """

    def __init__(self, symbols: int, embedding: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(symbols, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.head = nn.Linear(width, symbols)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_"):
                # A gate has two biases, which are added up: one of 1 and one of 0 make 1. torch
                # orders the gates as input, forget, cell and output.
                forget = parameter.detach()[width : 2 * width]
                nn.init.constant_(forget, 1.0 if name.startswith("bias_ih") else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map symbols to the logits of the symbol that follows each."""
        hidden, _ = self.lstm(self.tokens(x))
        logits: Tensor = self.head(hidden)
        return logits
