"""Checkpoints, safetensors files and ``torch.save`` files into each other. Begin with ``conversion``; needs torch."""
