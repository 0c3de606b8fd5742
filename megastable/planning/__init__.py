"""Floor 2: what a run will take, forecast before anything is built. Needs neither torch nor a GPU.

Start with ``run_plan``: every step's batch and learning rate, from a run file and a number of devices.

How long a step takes is predicted in this order:

1. ``core.flops`` counts the operations of a sample, and ``number_formats`` the bytes of what is sent.
2. ``data_sheet_cost`` turns them into seconds by a device's figures. ``measured_cost`` takes measured seconds instead,
   of whole steps or of pieces of the model. Both give a ``PipelineCost``: the passes of every stage, a transfer, and
   what a step costs once.
3. ``core.pipeline_cost`` plays the passes through the pipeline's schedule, which gives the seconds of a step.
4. ``forecast`` does so for every phase of the ramp, beside the memory of every stage (``memory``).

What stands on it: ``calibration`` keeps measured costs in a file, ``micro_batches`` and ``search`` choose the fastest,
``throughput`` and ``sweep`` hold predictions against measured steps, ``preflight`` reviews a run file.

The room imports config and core alone; what looks at this machine is handed in by the caller.
"""
