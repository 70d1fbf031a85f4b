"""A name that is wrapped proves nothing: forks that call a copy of it, or something else, are stopped.

Each fork is a copy of the stand-in with an edit as forks make them, run through the launcher; its weights, its
checkpoints and its exit status say what happened.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megaresume.cluster.processes import free_port
from tests.hosts.conftest import write_corpus
from tests.hosts.megatron.conftest import MINI, SCRIPTS, Mini, Run
from tests.hosts.megatron.layouts import run_python, script
from tests.release import release

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[3]
NEVER_SET = "training begins, and the order of its data was never set"
BUILD = "megatron.training.training.build_train_valid_test_data_iterators"

Edit = tuple[str, str, str]


def fork(root: Path, *edits: Edit) -> Path:
    """A copy of the stand-in with (file, old, new) replaced; returns its script."""
    tree = root / "fork"
    shutil.copytree(MINI, tree)
    for name, old, new in edits:
        path = tree / name
        text = path.read_text() if path.exists() else ""
        assert old in text, (name, old)
        path.write_text(text.replace(old, new) if old else new)
    return tree / SCRIPTS[0]


TRAINING = "megatron/training/training.py"
CALL = "else:\n        train_data_iterator, valid_data_iterator, test_data_iterator = build_"


def with_a_copy() -> list[Edit]:
    """As FlagScale: the old function stays, training calls a copy in another module."""
    text = (MINI / TRAINING).read_text()
    begin = text.index("def build_train_valid_test_data_iterators")
    copy = text[begin : text.index("def train_step")]
    header = "import torch\nfrom megatron.core.rerun_state_machine import RerunDataIterator\n"
    header += "from megatron.training.global_vars import get_args\n"
    header += "from megatron.training.training import build_train_valid_test_data_loaders\n\n\n"
    call = CALL.replace("else:\n        ", "else:\n        import fork_loop\n\n        ")
    return [("fork_loop.py", "", header + copy), (TRAINING, CALL, call.replace(" = build_", " = fork_loop.build_"))]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus for --data-path: what a fork's own function can build from, too."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(prefix, documents=300, seed=1)
    return prefix


def flags(corpus: Path, save: Path, *more: object, mode: str = "stream") -> list[object]:
    words: list[object] = ["--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--num-workers", 0, "--eval-iters", 0]
    words += ["--micro-batch-size", 2, "--global-batch-size", 8, "--train-iters", 4, "--save-interval", 2]
    words += ["--data-path", corpus, "--split", "100,0,0", "--megaresume-mode", mode, "--save", save, "--load", save]
    return [*words, *more]


def refused(run: Run, headline: str, *words: str) -> None:
    assert run.status == 1, run.output
    assert run.output.count(f"megaresume: error: {headline}") == 1 and "Traceback" not in run.output, run.output
    for word in words:
        assert word in run.output, run.output


def checkpoints(save: Path) -> list[str]:
    return sorted(path.name for path in save.glob("iter_*"))


def test_a_copy_of_the_function_is_called(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """Nothing is trained and nothing saved, on two ranks, in both modes; the message names the copy. off is off."""
    script, save = str(fork(tmp_path, *with_a_copy())), tmp_path / "save"
    run = mini(*flags(corpus, save), script=script)
    refused(run, NEVER_SET, BUILD, "fork_loop.build_train_valid_test_data_iterators", "train_step in")
    assert run.steps() == {} and checkpoints(save) == []
    run = mini(*flags(corpus, save, mode="guard"), script=script, num_processes=1)
    refused(run, NEVER_SET, BUILD)
    run = mini(*flags(corpus, save, mode="off"), script=script, num_processes=1)
    assert run.status == 0 and checkpoints(save) == ["iter_0000002", "iter_0000004"], run.output
    assert "megaresume:" not in run.output


def test_resumed_with_a_copy(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """A run of the stream goes on in such a tree, with a pipeline whose middle stage reads nothing: not one step."""
    save, layout = tmp_path / "save", ("--pipeline-model-parallel-size", 3)
    first = mini(*flags(corpus, save, "--exit-interval", 2, *layout), num_processes=3)
    assert first.status == 0 and len(first.steps()) == 2, first.output
    run = mini(*flags(corpus, save, *layout), script=str(fork(tmp_path, *with_a_copy())), num_processes=3)
    refused(run, NEVER_SET, BUILD, "fork_loop.build_train_valid_test_data_iterators")
    assert run.steps() == {} and checkpoints(save) == ["iter_0000002"]


def test_an_adaptor_replaces_the_function(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """After our hook, and without a checkpoint to load: it is named."""
    copy, _ = with_a_copy()
    late = "from megatron.training import pretrain, print_rank_0\n"
    adaptor = "import megatron.training.training as t, fork_loop\n"
    adaptor += "t.build_train_valid_test_data_iterators = fork_loop.build_train_valid_test_data_iterators\n"
    words = flags(corpus, tmp_path / "save")
    at = words.index("--load")
    del words[at : at + 2]
    script = fork(tmp_path, copy, (SCRIPTS[0], late, late + adaptor))
    run = mini(*words, script=str(script), num_processes=1)
    refused(run, f"{BUILD} was replaced by fork_loop.build_train_valid_test_data_iterators", "hooks.install()")
    assert run.steps() == {} and checkpoints(tmp_path / "save") == []


def test_the_data_is_built_twice(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """Ours is called, and what it gives is dropped for a copy's: no checkpoint of that."""
    copy, (name, old, new) = with_a_copy()
    twice = new.replace(
        "        train_data", f"        {'build_train_valid_test_data_iterators(provider)'}\n        train_data"
    )
    run = mini(*flags(corpus, tmp_path / "save"), script=str(fork(tmp_path, copy, (name, old, twice))), num_processes=1)
    refused(run, "the data that megaresume built is not what was trained on", "fork_loop.build")
    assert checkpoints(tmp_path / "save") == []


STEP = "        losses, *_ = train_step("


def test_the_data_is_replaced_in_the_middle(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """The first step trains on ours, the others on a copy's: taken once is not taken always."""
    copy, _ = with_a_copy()
    body = "(build_train_valid_test_datasets_provider):\n    args = get_args()\n    loaders"
    kept = body.replace("    loaders", "    args.fork_provider = build_train_valid_test_datasets_provider\n    loaders")
    swap = "        if iteration == 1:\n            import fork_loop\n\n"
    swap += "            fork = fork_loop.build_train_valid_test_data_iterators(args.fork_provider)\n"
    swap += "            train_data_iterator = fork[0]\n"
    script = fork(tmp_path, copy, (TRAINING, body, kept), (TRAINING, STEP, swap + STEP))
    run = mini(*flags(corpus, tmp_path / "save"), script=str(script))
    headline = "the data that megaresume built is not what was trained on"
    refused(run, headline, "16 samples trained, 8 of them taken", "fork_loop.build")
    assert checkpoints(tmp_path / "save") == []


ARGUMENTS, GLOBAL_VARS = "megatron/training/arguments.py", "megatron/training/global_vars.py"
SIZE = "    args.data_parallel_size = args.world_size // model_parallel\n"
SHARED = "    args.gtp_weight_remat_size = 2\n" + SIZE.replace("model_parallel", "(2 * model_parallel)")


def test_ranks_that_share_out_weights(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """Since core 0.19 ``args.data_parallel_size`` leaves out ranks that read samples of their own all the same."""
    calculator = (GLOBAL_VARS, "        args.data_parallel_size,\n", "        args.data_parallel_size * 2,\n")
    script, save = fork(tmp_path, (ARGUMENTS, SIZE, SHARED), calculator), tmp_path / "save"
    run = mini(*flags(corpus, save), script=str(script))
    assert run.status == 0 and len(run.steps()) == 4, run.output
    assert checkpoints(save) == ["iter_0000002", "iter_0000004"]


LOOP = "    iteration = args.iteration\n\n    def save"
COUNT = "        args.consumed_train_samples += size\n        stop"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (LOOP, f"    next(train_data_iterator)\n{LOOP}", "20 samples taken from the training iterator, 16 counted"),
        (
            COUNT,
            COUNT.replace("consumed_train", "fork_total"),
            "16 samples taken from the training iterator, 0 counted",
        ),
    ],
    ids=["a look at a batch", "a counter of its own"],
)
def test_batches_that_nobody_counts(mini: Mini, corpus: Path, tmp_path: Path, old: str, new: str, words: str) -> None:
    """A resume would train them again: no checkpoint says that it would not."""
    counter = (TRAINING, LOOP, f"    args.fork_total_samples = 0\n{LOOP}")
    script = fork(tmp_path, (TRAINING, old, new), counter)
    run = mini(*flags(corpus, tmp_path / "save"), script=str(script))
    refused(run, "batches were taken and not trained", words)
    assert checkpoints(tmp_path / "save") == []


def moved_save(format_: str) -> list[Edit]:
    text = (MINI / "megatron/training/checkpointing.py").read_text()
    begin = text.index("def save_checkpoint")
    copy = text[begin : text.index("\n\n\n", begin)]
    header = "from megatron.training.checkpointing import *\nfrom megatron.training import checkpointing\n"
    header += "globals().update(vars(checkpointing))\n\n\n"
    old = "from megatron.training.checkpointing import load_checkpoint, save_checkpoint"
    new = "from megatron.training.checkpointing import load_checkpoint"
    return [("fork_save.py", "", header + copy.replace("save_checkpoint", "write_checkpoint")), (TRAINING, old, new)]


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_a_moved_save(mini: Mini, corpus: Path, tmp_path: Path, ckpt_format: str) -> None:
    """No checkpoint without its state: it is stopped before the tracker names it."""
    save = tmp_path / "save"
    edits = [
        *moved_save(ckpt_format),
        (TRAINING, "        save_checkpoint(\n", "        import fork_save\n\n        fork_save.write_checkpoint(\n"),
    ]
    words = flags(corpus, save, "--ckpt-format", ckpt_format)
    run = mini(*words, script=str(fork(tmp_path, *edits)), num_processes=1)
    refused(
        run, "a checkpoint is about to be written without the state of its data", "write_checkpoint in", "fork_save.py"
    )
    assert not (save / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize("how", ["torch.save(%s, file)", "torch.save([%s], file)", "pickle.dump(%s, file)"])
def test_a_moved_save_after_one_of_ours(mini: Mini, corpus: Path, tmp_path: Path, how: str) -> None:
    """With a copy of the arguments, which holds the state of our save: stopped, or named at the end."""
    save = tmp_path / "save"
    writer = "import copy, pickle\nfrom pathlib import Path\nimport torch\n\n\ndef write(args, iteration):\n"
    writer += "    folder = Path(args.save, f'iter_{iteration:07d}')\n    folder.mkdir()\n"
    writer += "    with open(folder / 'common.pt', 'wb') as file:\n"
    writer += "        " + how % "{'args': copy.copy(args), 'iteration': iteration}" + "\n"
    writer += "    Path(args.save, 'latest_checkpointed_iteration.txt').write_text(str(iteration))\n"
    call = "            save()\n            saved = True"
    own = call.replace("save()", "__import__('fork_save').write(args, iteration) if iteration > 2 else save()")
    script = fork(tmp_path, ("fork_save.py", "", writer), (TRAINING, call, own))
    run = mini(*flags(corpus, save), script=str(script), num_processes=1)
    if how.startswith("torch.save"):
        refused(run, "a checkpoint is about to be written without the state of its data", "write in")
    else:
        refused(run, "checkpoints were written without the state of their data", "says 4, and", "called for 2 only")


def test_a_moved_load(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """In guard mode too, where it would have been taken for a run that was trained without us."""
    save = tmp_path / "save"
    first = mini(*flags(corpus, save, "--exit-interval", 2, mode="guard"), num_processes=1)
    assert first.status == 0, first.output
    text = (MINI / "megatron/training/checkpointing.py").read_text()
    begin = text.index("def load_checkpoint")
    copy = text[begin : text.index("\n\n\n", begin)].replace("load_checkpoint", "read_checkpoint")
    header = "from megatron.training import checkpointing\nglobals().update(vars(checkpointing))\n\n\n"
    call = "args.num_floating_point_operations_so_far = load_checkpoint("
    edits = [
        ("fork_load.py", "", header + copy),
        (TRAINING, call, call.replace("= load", '= __import__("fork_load").read')),
    ]
    run = mini(*flags(corpus, save, mode="guard"), script=str(fork(tmp_path, *edits)), num_processes=1)
    refused(run, "training continues at iteration 2, and no checkpoint was loaded through megaresume", "was not called")
    assert run.steps() == {}


def test_other_arguments_in_the_middle_of_a_run(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """A copy of Megatron's arguments knows nothing of the order that was set."""
    old = "    iteration = args.iteration\n    if args.do_train"
    new = (
        "    from megatron.training.global_vars import set_args\n    import copy\n\n    set_args(copy.copy(args))\n"
        + old
    )
    run = mini(*flags(corpus, tmp_path / "save"), script=str(fork(tmp_path, (TRAINING, old, new))), num_processes=1)
    refused(run, NEVER_SET, "replaced Megatron's arguments")
    assert checkpoints(tmp_path / "save") == []


def test_nobody_asks_whether_to_stop(mini: Mini, corpus: Path, tmp_path: Path) -> None:
    """And a program that swallows an error of ours does not end with status 0."""
    old, new = "any(get_signal_handler().signals_received())", "False"
    stop = ("--megaresume-stop-file", tmp_path / "stop")
    script = str(fork(tmp_path, (TRAINING, old, new)))
    run = mini(*flags(corpus, tmp_path / "save", *stop), script=script, num_processes=1)
    refused(run, "nothing checked whether to stop")


OWN_LOOP = """
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

zeros = torch.zeros
torch.zeros = lambda *size, device=None, **more: zeros(*size, **more)  # the schedule counts tokens on "cuda"
torch.distributed.init_process_group("gloo", init_method="env://")
parallel_state.initialize_model_parallel()
model = torch.nn.Linear(4, 1)
model.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
model.model_type = ModelType.encoder_or_decoder
model.set_input_tensor = lambda tensor: None
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
before = model.weight.detach().clone()

def forward_step(iterator, model):
    return model(next(iterator)).mean(), lambda output: (output, {"loss": output.detach()})

def train():
    for schedule in SCHEDULES:
        if schedule:
            get_forward_backward_func()(forward_step_func=forward_step, data_iterator=iter([torch.ones(2, 4)] * 9),
                model=model, num_microbatches=2, seq_length=4, micro_batch_size=2, forward_only=schedule == "evaluate")
        else:
            model(torch.ones(2, 4)).mean().backward()
        if schedule != "evaluate":
            optimizer.step()

try:
    train()
finally:
    print("weights", "unchanged" if torch.equal(before, model.weight) else "changed", flush=True)
"""


RELEASE = release(
    "`[loop1-AdamW]`: without the schedules of megatron-core",
    "the same, `[loop0-forward_backward_no_pipelining]`",
)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (["evaluate", "train"], "forward_backward_no_pipelining"),
        pytest.param([""], "AdamW", marks=RELEASE),
    ],
)
def test_a_loop_on_megatron_core_alone(tmp_path: Path, loop: list[str], words: str) -> None:
    """As Megatron-Bridge beside a checkout of Megatron-LM: evaluation passes, the first training step does not."""
    path = script(tmp_path / "train.py", OWN_LOOP.replace("SCHEDULES", repr(loop)))
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    done = run_python("-m", "megaresume.run", path, path=[REPOSITORY, MINI], **ranks)
    assert done.returncode == 1 and "weights unchanged" in done.stdout, done.stderr
    assert done.stderr.count("megaresume: error: training begins without megaresume's hooks") == 1, done.stderr
    assert (
        words in done.stderr
        and "train in" in done.stderr
        and str(path) in done.stderr
        and "Traceback" not in done.stderr
    )
    done = run_python("-m", "megaresume.run", path, "--megaresume-mode", "off", path=[REPOSITORY, MINI], **ranks)
    assert done.returncode == 0 and "weights changed" in done.stdout, done.stderr


def test_nothing_trained_is_one_line() -> None:
    """--help ends as it did, and says what was not called."""
    done = run_python("-m", "megaresume.run", MINI / SCRIPTS[0], "--help", path=[REPOSITORY])
    assert done.returncode == 0 and "--megaresume-data" in done.stdout, done.stderr
    said = [line for line in done.stderr.splitlines() if "megaresume" in line]
    assert len(said) == 1 and "nothing was trained in this process" in said[0] and BUILD in said[0]
