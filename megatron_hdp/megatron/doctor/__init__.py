"""``megatron-hdp doctor``: what is installed and what stands in the way."""

from megatron_hdp.megatron.doctor.doctor import run_doctor

__all__ = ["run_doctor"]
