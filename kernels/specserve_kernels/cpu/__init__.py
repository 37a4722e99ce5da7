"""The CPU paths: `torch_ops`, made of torch and numpy calls and exact by construction, and the native library."""
