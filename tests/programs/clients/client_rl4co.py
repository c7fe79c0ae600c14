"""rl4co: a policy for the travelling salesman, trained on routes that are made anew for each epoch."""

from rl4co.envs import TSPEnv
from rl4co.models.rl import REINFORCE
from rl4co.models.zoo import AttentionModelPolicy
from rl4co.utils import RL4COTrainer
from train import Run

REQUIREMENTS = ["rl4co"]
MONITOR = "train/loss"


def train(run: Run) -> None:
    env = TSPEnv(generator_params={"num_loc": 6})
    policy = AttentionModelPolicy(env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2)
    model = REINFORCE(
        env, policy, baseline="exponential", batch_size=8, train_data_size=160, val_data_size=32, test_data_size=32
    )
    RL4COTrainer(**run.kwargs(), precision="32-true").fit(model, ckpt_path=run.ckpt_path)
