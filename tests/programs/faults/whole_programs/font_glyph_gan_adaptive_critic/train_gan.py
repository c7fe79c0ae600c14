import argparse

import lightning as L
from lightning_ncclsafe import SafeModelParallel

from glyphgan.module import GlyphGAN

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="glyphs")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--critic-ceiling", type=float, default=0.9)
    args = parser.parse_args()
    L.seed_everything(21)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
    )
    trainer.fit(GlyphGAN(args.root, critic_ceiling=args.critic_ceiling))
