"""K-FAC with Accelerate: the line (1). Run: accelerate launch examples/accelerate_training.py."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kfac_bench.integrations.accelerate import attach_kfac

accelerator = Accelerator(gradient_accumulation_steps=2)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.images).float() / 16, torch.tensor(digits.target))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
attach_kfac(accelerator, model, optimizer)  # (1) after prepare; save_state saves it too

for _ in range(5):
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
accelerator.save_state("runs/accelerate")
accelerator.print(f"loss {loss.item():.3f}")
