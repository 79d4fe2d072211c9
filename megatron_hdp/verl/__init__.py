"""What verl loads by its entry point ``verl.plugins``: an engine of the vendor ``hdp``.

It is looked at with every ``import verl``, so nothing is loaded unless the engine is asked for by
``VERL_ENGINE_VENDOR=hdp``. verl tells nobody of a plugin that fails and takes its own engine, so
what fails is printed here.
"""

import os
import sys
import traceback

if os.environ.get("VERL_ENGINE_VENDOR") == "hdp":
    try:
        from megatron_hdp.verl import engine  # noqa: F401  registers itself
    except Exception:  # whatever it is, verl would swallow it
        traceback.print_exc()
        print(
            "megatron_hdp: found VERL_ENGINE_VENDOR=hdp, but its engine does not load (above), and "
            "verl would take its own: install what is missing, or unset the variable",
            file=sys.stderr,
        )
        raise
