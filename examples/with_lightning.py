"""speedrun.optim in a LightningModule, with a schedule, and checkpoints to go on from.

    pip install lightning
    python examples/with_lightning.py --folder run              # four epochs, a checkpoint after each
    python examples/with_lightning.py --folder run --resume run/epoch=1.ckpt

Two optimizers in one keep Lightning's automatic optimization; given as two they would be stepped by hand.
"""

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from speedrun.optim import Adam, Combined, NorMuon, route

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="run")
parser.add_argument("--resume", help="a checkpoint to go on from")
args = parser.parse_args()


class Bytes(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)
        self.model = nn.Sequential(nn.Embedding(256, 64), *hidden, nn.Linear(64, 256))

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Tensor, number: int) -> None:
        if self.trainer.is_last_batch:
            print(f"epoch {self.current_epoch + 1}  loss {outputs['loss']:.6f}")

    def configure_optimizers(self) -> Any:
        plan = route(self.model)
        optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.003))
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)]


torch.manual_seed(0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 40))
rows: DataLoader[Tensor] = DataLoader(text.unfold(0, 33, 9), batch_size=8)  # type: ignore[arg-type]
quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
every = ModelCheckpoint(args.folder, filename="{epoch}", save_top_k=-1)
trainer = lightning.Trainer(accelerator="cpu", max_epochs=4, callbacks=[every], **quiet)
trainer.fit(Bytes(), rows, ckpt_path=args.resume)
