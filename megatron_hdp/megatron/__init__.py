"""The only room that knows Megatron: CPU shim, model parts, data-parallel step and checkpoint."""
