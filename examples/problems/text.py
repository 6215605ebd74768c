"""A tiny GPT-2 of Hugging Face that models the text of the Python manual, letter by letter.

Run: kfac-train problem=examples/problems/text.py optimizer=adamw kfac=none
"""

import pydoc_data.topics

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from kfac_bench import Problem

LENGTH = 32
text = "".join(pydoc_data.topics.topics.values())[:40_000]
symbols = sorted(set(text))
ids = torch.tensor([symbols.index(c) for c in text]).split(LENGTH)[:-1]


def network():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(symbols), **sizes, **rates, **tokens))


def loss(model, batch):
    known, next_ones = batch[:, :-1], batch[:, 1:]
    logits = model(input_ids=known, attention_mask=torch.ones_like(known)).logits
    return nn.functional.cross_entropy(logits.mT, next_ones), logits


def nats(model, batch):
    return loss(model, batch)[0]


problem = Problem(
    model=network,
    train=ids[:1000],
    validation=ids[1000:],
    loss=loss,
    metric=nats,
    higher_is_better=False,
    batch_size=50,
    likelihood="categorical",
)
