"""K-FAC in Hugging Face's Trainer: the line (1). Run: python examples/huggingface_trainer.py."""

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from kfac_bench.integrations.huggingface import KFACCallback

digits = load_digits()
images = torch.tensor(digits.images).float().unsqueeze(1) / 16
rows = [{"pixel_values": x, "labels": y} for x, y in zip(images, digits.target, strict=True)]
config = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_labels=10,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)
trainer = Trainer(
    ViTForImageClassification(config),
    TrainingArguments("runs/huggingface", per_device_train_batch_size=64, learning_rate=3e-3),
    train_dataset=rows[:1400],
    eval_dataset=rows[1400:],
    callbacks=[KFACCallback()],  # (1)
)
trainer.train()
print(f"test loss {trainer.evaluate()['eval_loss']:.3f}")
