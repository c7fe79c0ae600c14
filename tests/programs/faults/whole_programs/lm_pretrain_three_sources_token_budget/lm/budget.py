import lightning as L


class TokenBudget(L.Callback):
    """Ends pretraining after a number of non-padding tokens, as in the scaling-law grid."""

    def __init__(self, tokens: float):
        self.tokens = int(tokens)
        self.seen = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += int((batch != 0).sum()) * trainer.world_size
        if self.seen >= self.tokens:
            trainer.should_stop = True  # <- here

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
