import torch


@torch.inference_mode()
def complete(model, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Greedy decoding of one prompt, without a cache of keys and values (our models are small)."""
    sequence = prompt.unsqueeze(0)
    for _ in range(tokens):
        logits = model(sequence[:, -model.context :])
        sequence = torch.cat([sequence, logits[:, -1:].argmax(-1)], dim=1)
    return sequence[0, len(prompt) :]
