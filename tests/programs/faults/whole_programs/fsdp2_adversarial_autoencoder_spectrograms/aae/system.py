import lightning as L
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from .nets import AutoEncoder, LatentCritic


class AdversarialAutoEncoder(L.LightningModule):
    """Reconstruction, and a critic that pulls the latent code towards a Gaussian.

    The encoder plays against the critic only while the critic is good enough to give it a useful gradient.
    """

    def __init__(self, lr=1e-3, critic_lr=5e-4, min_critic_acc=0.6, adv_weight=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.autoencoder = AutoEncoder()
        self.critic = LatentCritic()

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.autoencoder.encoder, mesh=mesh)
        fully_shard(self.autoencoder.decoder, mesh=mesh)
        fully_shard(self.critic, mesh=mesh)

    def training_step(self, x, batch_idx):
        opt_ae, opt_critic = self.optimizers()

        z, y = self.autoencoder(x)
        rec = F.mse_loss(y, x)
        opt_ae.zero_grad()
        self.manual_backward(rec)
        opt_ae.step()

        prior = torch.randn_like(z)
        codes = torch.cat([prior, z.detach()])
        target = torch.cat([torch.ones(len(prior)), torch.zeros(len(z))])
        score = self.critic(codes)
        loss_critic = F.binary_cross_entropy_with_logits(score, target)
        opt_critic.zero_grad()
        self.manual_backward(loss_critic)
        opt_critic.step()
        accuracy = ((score > 0) == target.bool()).float().mean()
        self.log_dict({"rec": rec, "critic_acc": accuracy}, prog_bar=True)

        if accuracy >= self.hparams.min_critic_acc:  # <- here
            self._fool_critic(x, opt_ae)

    def _fool_critic(self, x, opt_ae):
        z = self.autoencoder.encoder(x)
        loss = self.hparams.adv_weight * F.softplus(-self.critic(z)).mean()
        opt_ae.zero_grad()
        self.manual_backward(loss)
        opt_ae.step()

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.autoencoder.parameters(), lr=self.hparams.lr),
            torch.optim.Adam(self.critic.parameters(), lr=self.hparams.critic_lr, betas=(0.5, 0.9)),
        ]
