"""Every place where megastable departs from DeepSpeed 0.19.8 or from torch, and what to read again after an upgrade.

A departure names the functions upstream that it replaces, avoids or reaches into, each with a hash of its source. A
test compares them, so that an upgrade which changes one fails with its name; ``python -m megastable.engine.departures``
prints what has changed. Read that function again, decide whether the departure still holds, and record the new hash.
Each departure also names the test that fails without it.
"""

from __future__ import annotations

from megastable.core.scripts import run_script
from megastable.engine.upstream import Departure, changes

PIPE_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
PIPE_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ELASTIC_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"


DEPARTURES: tuple[Departure, ...] = (
    Departure(
        name="instructions: activations are received where they stay",
        scope="engine",
        symptom="every received activation is copied twice",
        cause="DeepSpeed receives into one buffer, clones it to keep it, and clones that to compute with",
        upstream={
            f"{PIPE_ENGINE}._exec_recv_activations": "92ba4d9dc360",
            f"{PIPE_ENGINE}._recv_tensor_meta": "01e316793e2a",
        },
        test="tests/engine/test_instructions.py::test_no_received_activation_is_copied_and_no_output_is_held",
    ),
    Departure(
        name="instructions: a forward pass that drops the logits",
        scope="engine",
        symptom="inputs are copied, and the last stage holds the logits of two micro-batches",
        cause="DeepSpeed clones the input, which a layer may write into, and keeps outputs until others replace them",
        upstream={f"{PIPE_ENGINE}._exec_forward_pass": "1c6034990be7", f"{ENGINE}.forward": "b14a234e2541"},
        test="tests/engine/test_instructions.py::test_no_received_activation_is_copied_and_no_output_is_held",
    ),
    Departure(
        name="replay: the passes of a step without its update",
        scope="engine",
        symptom="nothing names the first value that was not finite",
        cause="DeepSpeed executes passes and update as one; its map of instructions can leave parts out",
        upstream={
            f"{PIPE_ENGINE}._exec_schedule": "06dc223e4c28",
            f"{PIPE_ENGINE}._train_schedule": "413376850fa6",
            f"{PIPE_ENGINE}.train_batch": "3cb14d393b36",
        },
        test="tests/engine/test_culprit.py::test_training_goes_on_as_if_nobody_had_searched",
    ),
    Departure(
        name="replay: the losses of an evaluation, one by one",
        scope="engine",
        symptom="a spike does not name its samples",
        cause="DeepSpeed returns the mean over micro-batches, and leaves their losses in fwd_outputs",
        upstream={f"{PIPE_ENGINE}.eval_batch": "5eaf158f7108"},
        test="tests/engine/test_culprit.py::test_the_sample_of_a_spike_has_the_largest_loss_of_its_own",
    ),
    Departure(
        name="instructions: passes are timed in a watched step",
        scope="engine",
        symptom="nothing shows which rank the others wait for",
        cause="DeepSpeed times passes on all steps or on none, and prints the times instead of returning them",
        upstream={
            f"{PIPE_ENGINE}._exec_schedule": "06dc223e4c28",
            f"{PIPE_ENGINE}._exec_backward_pass": "11f858c9880e",
        },
        test="tests/engine/test_layer_watch.py::test_every_value_of_every_layer_equals_one_process",
    ),
    Departure(
        name="instructions: tied gradients are summed where they accumulate",
        scope="engine",
        symptom="with fp16 and fp32 accumulation the copies of a tied weight drift apart without an error",
        cause="DeepSpeed sums weight.grad, which is empty there: ZeRO accumulates in weight.grad_accum",
        upstream={
            f"{PIPE_ENGINE}._exec_reduce_tied_grads": "ea54bf588a1e",
            f"{ZERO}.get_param_gradient_attribute": "3ec9927d2f4c",
        },
        test="tests/engine/test_precision.py::test_tied_copies_stay_equal",
    ),
    Departure(
        name="instructions: partial gradients are summed over tensor ranks",
        scope="engine",
        symptom="norms and biases drift apart between tensor ranks without an error",
        cause="a tensor rank sees its slice of the sequence, or its heads; DeepSpeed expects whole gradients",
        upstream={f"{PIPE_ENGINE}._exec_reduce_tied_grads": "ea54bf588a1e"},
        test="tests/engine/test_tensor_parallel.py::test_every_gradient_is_its_part_of_the_one_process_gradient",
    ),
    Departure(
        name="instructions: one replica reduces no gradients",
        scope="engine",
        symptom="every step copies all gradients into a bucket and out of it, and allocates the bucket",
        cause="DeepSpeed reduces over a group of one rank like over any other",
        upstream={f"{PIPE_ENGINE}._exec_reduce_grads": "f2ad3fb2b959", f"{ZERO}.reduce_gradients": "188c3d25cec0"},
        test="tests/engine/test_instructions.py::test_one_replica_reduces_no_gradients",
    ),
    Departure(
        name="weight_update: optimizer.step is replaced",
        scope="optimizer",
        symptom="an fp16 step at which the scale doubles applies half of its gradient; in fp32 and with BF16_Optimizer "
        "a bad value in a copy of a parameter is applied; a step makes many passes and seven collectives",
        cause="DeepSpeed updates the scale before it unscales, and searches for bad values in parameters counted once",
        upstream={
            f"{ZERO}.step": "5a522828a63e",
            f"{ZERO}._update_scale": "d459bdf88d3b",
            f"{ZERO}.update_lp_params": "ebbc09e8aef5",
            f"{BF16}.step": "92ba2f4d1f4b",
            f"{BF16}.update_lp_params": "23541dc89791",
            f"{BF16}.clear_hp_grads": "79d74a9f41b9",
            f"{PIPE_ENGINE}._exec_optimizer_step": "6cb61dd7a72a",
            # Where a parameter lies in the flat weights, and which copy of a tied one counts, is read from their marks.
            "deepspeed.utils.mixed_precision_linkage:link_hp_params": "6eb3d44e37f2",
            "deepspeed.utils.tensor_fragment:get_hp_fragment_mapping": "a81cfb8d7156",
            f"{PIPE_MODULE}._index_tied_modules": "eca4a91de66f",
            f"{ENGINE}._take_model_step": "0262e1e15c77",
        },
        test="tests/engine/test_precision.py::test_a_step_that_grows_the_scale_applies_its_whole_gradient",
    ),
    Departure(
        name="optimizer: steps at the minimum loss scale are skipped",
        scope="optimizer",
        symptom="a run ends in the middle of a step, with a stack trace in place of a diagnosis",
        cause="the loss scaler raises where it cannot lower the scale",
        upstream={"deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler.update_scale": "8d258f631325"},
        test="tests/runs/test_launch.py::test_a_run_that_no_loss_scale_can_save_stops_with_a_diagnosis",
    ),
    Departure(
        name="training_engine: buffers are reset where the ramp changes the micro-batch size",
        scope="engine",
        symptom="a stage receives activations of the old size: it crashes or waits for ever",
        cause="set_train_micro_batch_size changes the configuration, not the buffers of activations and gradients",
        upstream={
            f"{ENGINE}.set_train_micro_batch_size": "44b65d5b5c14",
            f"{PIPE_ENGINE}.reset_activation_shape": "8f0776cd85eb",
            f"{PIPE_ENGINE}.set_train_batch_size": "4c87eb494a8d",
        },
        test="tests/engine/test_same_run_under_any_layout.py::test_losses_and_norms_equal_one_process",
    ),
    Departure(
        name="training_engine: the engine's monitor is silent",
        scope="engine",
        symptom="TensorBoard and its kin show some values twice, under two names, and one at every evaluated batch",
        cause="DeepSpeed writes loss, LR and loss scale out of its engine, without what megastable knows of the step",
        upstream={f"{PIPE_ENGINE}.train_batch": "3cb14d393b36", f"{PIPE_ENGINE}.eval_batch": "5eaf158f7108"},
        test="tests/engine/test_training_engine.py::test_deepspeed_writes_no_values_of_its_own",
    ),
    Departure(
        name="training_engine: the timer of a step is reset",
        scope="engine",
        symptom="memory grows by one record a step, of two device events each on a GPU",
        cause="DeepSpeed clears the timer where it prints, which it is never asked to",
        upstream={"deepspeed.utils.timer:SynchronizedWallClockTimer.Timer": "a6512a2023d2"},
        test="tests/engine/test_training_engine.py::test_nothing_is_kept_of_past_steps",
    ),
    Departure(
        name="deepspeed_config: sums in fp32 travel in fp32",
        scope="engine",
        symptom="gradients that were accumulated in fp32 are rounded to 16 bits on their way between replicas",
        cause="the format of communication follows that of the weights",
        upstream={f"{ENGINE}.communication_data_type": "192afa4cb76c"},
        test="tests/engine/test_precision.py::test_fp32_sums_travel_in_fp32",
    ),
    Departure(
        name="deepspeed_config: activations are not split over tensor ranks",
        scope="engine",
        symptom="a stage sends parts of its output that the next one does not expect",
        cause="pipe_partitioned and grad_partitioned are on by default; both together trade sends for gathers, one "
        "alone fails or hangs, and our forward pass handles neither",
        upstream={f"{PIPE_ENGINE}.__init__": "c6b9a76edf25"},
        test="tests/engine/test_tensor_parallel.py::test_twenty_steps_are_those_of_one_process",
    ),
    Departure(
        name="deepspeed_config: recomputation is not reentrant",
        scope="module",
        symptom="compiled blocks have two forms for every micro-batch size, one of them for passes without gradients",
        cause="the reentrant form runs a segment without a graph first, and with one in the backward pass",
        upstream={
            "deepspeed.runtime.activation_checkpointing.checkpointing:non_reentrant_checkpoint": "62a62a06ef1e",
            f"{PIPE_MODULE}._is_checkpointable": "c8311e4272bc",
        },
        test="tests/engine/test_compile.py::test_steps_are_equal_and_each_micro_batch_size_is_compiled_once",
    ),
    Departure(
        name="deepspeed_config: the gradient bucket has the size of the model",
        scope="engine",
        symptom="every step allocates 2 GB, even for a tiny model",
        cause="DeepSpeed's bucket has 500 million elements, and under a pipeline every reduction allocates it anew",
        upstream={f"{ZERO}.reduce_gradients": "188c3d25cec0"},
        test="tests/engine/test_training_engine.py::test_the_gradient_bucket_is_no_larger_than_the_model",
    ),
    Departure(
        name="pipeline_module: layers draw their weights by their global index",
        scope="module",
        symptom="the weights that a run starts from depend on its layout",
        cause="DeepSpeed's layers draw from the generator of their process, in the order in which it builds them",
        upstream={
            "deepspeed.runtime.pipe.module:LayerSpec.build": "311c3a4ea735",
            "deepspeed.runtime.pipe.module:TiedLayerSpec": "d80484c0f4f9",
            f"{PIPE_MODULE}._build": "3c494222f210",
        },
        test="tests/engine/test_same_run_under_any_layout.py::test_losses_and_norms_equal_one_process",
    ),
    Departure(
        name="pipeline_module: stages are cut by our own bounds",
        scope="module",
        symptom="stages are not those that the plan has shown, and every rank builds the whole model once",
        cause="DeepSpeed cuts by counts of parameters and layers only",
        upstream={f"{PIPE_MODULE}._partition_layers": "375b991e19f2", f"{PIPE_MODULE}._set_bounds": "34ea5249e076"},
        test="tests/engine/test_same_run_under_any_layout.py::test_losses_do_not_depend_on_where_the_stages_are_cut",
    ),
    Departure(
        name="pipeline_module: tied weights are sent without a graph",
        scope="module",
        symptom="torch warns that a backward pass goes through a broadcast, and that this is deprecated",
        cause="DeepSpeed broadcasts into parameters while gradients are recorded",
        upstream={f"{PIPE_MODULE}._synchronize_tied_weights": "0c1a4c893a5b"},
        test="tests/engine/test_training_engine.py::test_an_engine_is_built_and_steps_in_silence",
    ),
    Departure(
        name="pipeline_module: the constructor's tables are not printed",
        scope="module",
        symptom="every start prints seeds, the topology with all ranks, and tied weights",
        cause="DeepSpeed prints them instead of logging them",
        upstream={f"{PIPE_MODULE}.__init__": "272a55105010", f"{PIPE_MODULE}._index_tied_modules": "eca4a91de66f"},
        test="tests/engine/test_training_engine.py::test_an_engine_is_built_and_steps_in_silence",
    ),
    Departure(
        name="pipeline_module: torch keeps more compiled forms",
        scope="process",
        symptom="from the ninth micro-batch size on, blocks run uncompiled without a word",
        cause="torch keeps eight compiled forms of a function, and all blocks share theirs",
        upstream={"torch._dynamo.cache_size:exceeds_recompile_limit": "c354365cb6e5"},
        test="tests/engine/test_compile.py::test_more_micro_batch_sizes_than_torch_keeps_forms_are_compiled",
    ),
    Departure(
        name="device: fp16 is allowed on a CPU",
        scope="process",
        symptom="fp16 cannot be tried, or tested, without a GPU",
        cause="DeepSpeed refuses it on a CPU without native fp16, where torch computes it slowly",
        upstream={
            f"{ENGINE}._do_sanity_check": "e8984a269474",
            "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator.is_fp16_supported": "3ca8114c0b66",
        },
        test="tests/engine/test_precision.py::test_sixteen_bits_follow_fp32",
    ),
    Departure(
        name="engine/__init__: the accelerator is settled beforehand",
        scope="process",
        symptom="every rank on a CPU warns that no accelerator was detected",
        cause="DeepSpeed probes for accelerators while it is imported, unless DS_ACCELERATOR names one",
        upstream={"deepspeed.accelerator.real_accelerator:get_accelerator": "e6b52d28d69d"},
        test="tests/engine/test_process_group.py::test_the_accelerator_is_found_without_a_warning",
    ),
    Departure(
        name="process_group: the process group is made before DeepSpeed's",
        scope="process",
        symptom="two runs on one machine meet at the same port, and one of them fails",
        cause="DeepSpeed meets at the port of the launcher, whose default is the same for all, and asks for oneCCL",
        upstream={"deepspeed.comm.comm:init_distributed": "3f79e2fcf524"},
        test="tests/runs/test_launch.py::test_a_killed_run_continues_exactly_beside_another_run",
    ),
    Departure(
        name="rendezvous: each attempt has a part of torchrun's store of its own",
        scope="process",
        symptom="ranks that torchrun has started again connect to those that have ended, and fail",
        cause="torchrun keeps its store over restarts, and torch's own clients of it write under the same keys",
        upstream={
            "torch.distributed.rendezvous:_create_c10d_store": "aa6e1404d895",
            f"{ELASTIC_RENDEZVOUS}.next_rendezvous": "85528aebd91b",
        },
        test="tests/engine/test_rendezvous.py::test_a_restarted_launch_reads_nothing_of_the_attempts_before",
    ),
    Departure(
        name="process_group: LOCAL_RANK is set",
        scope="process",
        symptom="a run under srun, or without a launcher, fails as it builds its module",
        cause="DeepSpeed reads LOCAL_RANK from the environment in many places, and srun does not set it",
        upstream={f"{PIPE_MODULE}.__init__": "272a55105010"},
        test="tests/runs/test_launch.py::test_slurm_variables_are_enough",
    ),
    Departure(
        name="process_group: sub-groups have the timeout of the run",
        scope="process",
        symptom="a collective of some of the ranks fails after 10 or 30 minutes, also where it waits for a slow save",
        cause="new groups do not inherit a timeout; DeepSpeed passes none, and torch has defaults by backend",
        upstream={"torch.distributed.distributed_c10d:_get_default_timeout": "132fab7bdf9f"},
        test="tests/engine/test_process_group.py::test_sub_groups_have_the_timeout_of_the_run",
    ),
    Departure(
        name="process_group: deepspeed_shm_comm is not built",
        scope="process",
        symptom="the first start compiles for a minute, in a folder that launches race for, and fails without ninja",
        cause="DeepSpeed builds the extension for its inference all-reduce wherever it connects",
        upstream={"deepspeed.comm.torch:build_shm_op": "5ee7daeb8dd5"},
        test="tests/engine/test_process_group.py::test_connecting_builds_no_extension",
    ),
    Departure(
        name="process_group: processes of a node share its cores",
        scope="process",
        symptom="without OMP_NUM_THREADS each process starts as many threads as the node has cores",
        cause="torch takes all cores in every process",
        upstream={},
        test="tests/engine/test_process_group.py::test_processes_of_a_node_share_its_cores",
    ),
    Departure(
        name="writers: what a start before wrote of later steps is taken back",
        scope="engine",
        symptom="after a resume that goes back, steps stand twice in TensorBoard and CSV files",
        cause="DeepSpeed's writers append to what is there, and have no word for a step from which they go on",
        upstream={
            "deepspeed.monitor.csv_monitor:csvMonitor.setup_log_dir": "04ae0cfddb92",
            "deepspeed.monitor.csv_monitor:csvMonitor.write_events": "ebc349136b8b",
            "deepspeed.monitor.tensorboard:TensorBoardMonitor.get_summary_writer": "a7ee5f1aa1cb",
            "torch.utils.tensorboard.writer:SummaryWriter._get_file_writer": "d009ece719e9",
            "torch.utils.tensorboard.writer:SummaryWriter.close": "ee3e1cf4e772",
        },
        test="tests/engine/test_writers.py::test_every_step_stands_once_after_any_starts",
    ),
    Departure(
        name="packing: every stage reads the micro-batches",
        scope="engine",
        symptom="the stages between the first and the last do not know where documents begin",
        cause="DeepSpeed loads micro-batches on the first and the last stage, and gives the others no iterator",
        upstream={
            f"{PIPE_ENGINE}._exec_load_micro_batch": "d933f2182f79",
            f"{PIPE_ENGINE}.set_dataiterator": "c5c523943ddd",
        },
        test="tests/engine/test_packing.py::test_a_document_that_is_edited_leaves_its_neighbours_loss_on_three_stages",
    ),
    Departure(
        name="packing: blocks are computed again with their own documents",
        scope="engine",
        symptom="gradients are those of attention across other documents",
        cause="a block is called again in the backward pass, when later micro-batches have passed forward",
        upstream={
            f"{PIPE_ENGINE}._reentrant_activation_checkpointing": "969baaaa04d5",
            f"{PIPE_MODULE}.forward": "0c4629b298a0",
        },
        test="tests/engine/test_packing.py::test_a_step_is_that_of_every_document_alone",
    ),
    Departure(
        name="host_memory: freed memory is kept",
        scope="process",
        symptom="large temporaries are paged in anew at every step, which may cost more than the arithmetic on them",
        cause="glibc maps blocks over 32 MB anew each time, and torch's allocator on a CPU keeps nothing",
        upstream={},
        test="tests/engine/test_host_memory.py::test_freed_memory_is_not_faulted_in_again",
    ),
)


def main() -> None:
    """Print every function upstream whose source is not the recorded one."""
    found = [line for departure in DEPARTURES for line in changes(departure)]
    print("\n".join(found) or "every function upstream is as recorded")


if __name__ == "__main__":
    run_script(main)
