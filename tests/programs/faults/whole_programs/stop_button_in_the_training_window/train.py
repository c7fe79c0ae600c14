from lightning.pytorch.cli import LightningCLI
from pose.model import KeypointModel, SyntheticFrames


def cli_main(args=None):
    return LightningCLI(
        KeypointModel,
        SyntheticFrames,
        args=args,
        parser_kwargs={"fit": {"default_env": False}},
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    cli_main()
