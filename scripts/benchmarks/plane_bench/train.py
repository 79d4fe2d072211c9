"""One rank of `megatron_hdp.pretrain_gpt` whose own loaders are as slow as the data plane's."""

import sys

from megatron_hdp.data_plane.hooks import run_hook
from megatron_hdp.pretrain_gpt import main

if __name__ == "__main__":
    run_hook()
    sys.exit(main())
