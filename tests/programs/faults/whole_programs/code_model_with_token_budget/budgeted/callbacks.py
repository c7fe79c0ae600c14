from lightning.pytorch.callbacks import Callback


class TokenBudget(Callback):
    """Scaling-law runs are compared at equal numbers of tokens, not steps."""

    def __init__(self, budget, pad=0):
        self.budget, self.pad, self.seen = budget, pad, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += int((batch != self.pad).sum()) * trainer.world_size
        pl_module.log("tokens", float(self.seen), prog_bar=True)
        if self.seen >= self.budget:
            trainer.should_stop = True  # <- here

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
