"""K-FAC in a loop with timm: the line marked (1). Run: python examples/timm_training.py."""

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import NativeScaler

from kfac_bench import KFAC

device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
images = torch.tensor(digits.images, device=device).float().unsqueeze(1) / 16
labels = torch.tensor(digits.target, device=device)
sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 32, "depth": 2, "num_heads": 2}
model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes).to(device)
optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
scheduler, epochs = create_scheduler_v2(optimizer, num_epochs=15, warmup_epochs=1)
scaler = NativeScaler(device)
KFAC(model, optimizer).attach(scaler._scaler)  # (1)

for epoch in range(epochs):
    for batch in torch.randperm(len(images)).split(64):
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            loss = torch.nn.functional.cross_entropy(model(images[batch]).float(), labels[batch])
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
    scheduler.step(epoch + 1)
print(f"loss {loss.item():.3f}")
