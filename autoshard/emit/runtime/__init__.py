"""Runtime library of the generated model: a mesh of named axes, collectives with gradients, sharded parameters.

Launched by torchrun on gloo, NCCL or HCCL. On each mesh axis a tensor has one of these layouts:
  S<d>  sharded: each device holds a slice of dim d and the same slice of the gradient
  R     replicated: each device holds the whole tensor and the whole gradient, equal on all
  R+    replicated: each device holds the whole tensor; the true gradient is the sum over the axis
  P     partial: the true value is the sum over the axis; each device holds the whole gradient
A layout is written with one placement per axis, in mesh order: "S0 R".
"""

from .attention import parallel_attention, random_attention, repeated_part
from .attention_ring import balanced_ring_attention, ring_attention
from .autograd_leaves import local
from .axis import Axis, Sent, Transport, held_indices, shard_bounds, shard_size
from .checkpoint import (
    SaveError,
    finish_saving,
    full_state_dict,
    load_checkpoint,
    load_full_state_dict,
    loader_state,
    put_in_place,
    save_checkpoint,
    saved_seed,
)
from .checkpoint_index import fault_of, load_tensors, newest_whole, read_index, step_folders
from .column_parallel import column_parallel, shared_column_parallel
from .compiling import compile_blocks
from .convolution import (
    halo_avg_pool,
    halo_convolution,
    halo_max_pool,
    halo_transposed_convolution,
    parallel_global_pool,
)
from .embedding_bags import parallel_embedding_bag
from .exchange import exchange
from .experts import dispatched_experts, parallel_experts
from .failures import Failures, described
from .flat_weights import gathered_ahead, gathered_together
from .float8 import float8_linear
from .full_tensors import full_value
from .fused_updates import has_fused_adamw
from .gradients import accumulating, clip_gradients, reduce_gradients, reducing
from .host_rows import to_device, to_host
from .initialisation import init_computed, init_parameter, init_parameters, unpacked
from .learning_rate import SHAPES, make_schedule
from .loss_scaling import LossScaler
from .losses import parallel_cross_entropy, parallel_loss, parallel_nll_loss
from .mesh import ParallelMesh, leave
from .micro_batches import BatchShares, LabelShares, counted, label_shares, losses_of, slices_of
from .nonfinite import EXIT_CODE, FiniteSteps, NonFinite, start_loss_sum
from .normalisation import (
    parallel_group_norm,
    parallel_layer_norm,
    parallel_log_softmax,
    parallel_rms_norm,
    parallel_softmax,
    synchronised_batch_norm,
)
from .operators import (
    parallel_mean,
    parallel_mse_loss,
    vocabulary_parallel_embedding,
    vocabulary_range,
)
from .parameters import (
    Sharding,
    assign,
    full_tensor,
    shard_buffer,
    shard_parameter,
    sharding,
    whole_tensors,
)
from .places import Handed, Places
from .prefetch import Prefetched, Read
from .profiling import profiling
from .random_tensors import random_bernoulli, random_multinomial, random_noise, random_tensor
from .randomness import Random, dropout_mask, random_dropout
from .recompute import recomputed
from .recurrent_cells import parallel_gru_cell, parallel_lstm_cell, parallel_rnn_cell
from .redistribution import (
    all_gather,
    all_reduce,
    all_to_all,
    cast_weight,
    copy,
    gather_once,
    mask,
    reduce_scatter,
    regather,
    slice_shard,
    zero_pad,
)
from .rotary import rotate_half
from .size_buckets import by_size
from .stages import Stages
from .start_variables import StartError, node_name, processes_started, take_start, tell_left
from .stop_signals import EXIT_STOPPED, StopSignals, listening
from .training_log import TrainingLog
from .user_code import register_operators
from .weight_files import WeightFiles
from .weights import regather_before, regathering
