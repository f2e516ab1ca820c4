"""Imports inside functions: each module that has some, with the reason; all other modules import at the top."""

import ast

from tests.support.paths import ROOT

FOLDERS = ("dsl", "planner", "runtime", "examples")
COMMAND = "start-up time: a command loads the planner and the model only when it needs them"
REASONS = {
    "dsl/graph.py": "start-up time: networkx takes 0.2 s",
    "dsl/show/table.py": "start-up time: rich",
    "planner/cli/actions.py": COMMAND,
    "planner/cli/arguments.py": COMMAND,
    "planner/cli/budget_options.py": COMMAND,
    "planner/cli/adapter_options.py": COMMAND,
    "planner/cli/calibrate.py": COMMAND,
    "planner/cli/compare.py": COMMAND,
    "planner/cli/explain.py": COMMAND,
    "planner/cli/export.py": COMMAND,
    "planner/cli/main.py": COMMAND,
    "planner/cli/plan_options.py": COMMAND,
    "planner/cli/process.py": COMMAND,
    "planner/cli/run_options.py": COMMAND,
    "planner/cli/second_opinion.py": COMMAND,
    "planner/cli/settings.py": COMMAND,
    "planner/cli/versions.py": "start-up time: importlib.metadata takes 30 ms",
    "planner/contract/choices.py": "start-up time: numpy, only for columns of layouts",
    "planner/contract/layout.py": "start-up time: `plan --help` lists the layout fields without loading dsl",
    "planner/contract/plan_json.py": "start-up time: cattrs, only for reading a plan",
    "planner/contract/state_placement.py": "start-up time: numpy, only for columns of layouts",
    "planner/export/export.py": "start-up time: `--help` lists the targets without loading their writers",
    "planner/export/target.py": "start-up time: `--help` lists the targets without loading dsl",
    "planner/hardware/cluster_names.py": "start-up time: a cluster file is read only if one is named",
    "runtime/cli/__main__.py": "signals are heard while the command line is imported",
    "runtime/cli/main.py": "start-up time, and torch may be missing: each command loads its own module",
    "runtime/cli/run_commands.py": "start-up time, and torch may be missing: each command loads its own module",
    "runtime/cli/training_commands.py": "start-up time, and torch may be missing: each command loads its own module",
    "runtime/data/documents.py": "start-up time: the libraries of a format are loaded for files of that format",
    "runtime/data/images.py": "Pillow is an extra",
    "runtime/data/rows.py": "start-up time: the libraries of a format are loaded for files of that format",
    "runtime/data/sentences.py": "sentencex is an extra",
    "runtime/data/tokenizer.py": "start-up time: transformers takes seconds, and each kind of tokenizer has a library",
    "runtime/data/tokenizer_files.py": "start-up time: transformers takes seconds",
    "runtime/data/tokenizer_source.py": "start-up time: transformers takes seconds, and few tokenizers are of the hub",
    "runtime/data/vocabulary_files.py": "start-up time: the library of a format is loaded for files of that format",
    "runtime/generation/sampling.py": "start-up time: transformers takes seconds, and greedy search needs none of it",
    "runtime/megatron/cpu_shim.py": "megatron-core is imported after its CUDA calls are replaced",
    "runtime/megatron/device.py": "megatron-core is imported after its CUDA calls are replaced",
    "runtime/metrics/trackers.py": "the packages of trackers are extras",
    "runtime/modules/engine.py": "Transformer Engine is no requirement, and takes seconds",
    "runtime/training/evaluation.py": "the starting process does not load torch; its ranks do",
    "runtime/training/failures.py": "the starting process does not load torch; its ranks do",
    "runtime/training/initial_weights.py": "the starting process does not load megatron-core for a Hugging Face folder",
    "runtime/training/launch.py": "the starting process does not load torch; its ranks do",
    "runtime/training/verify.py": "the starting process does not load torch; its ranks do",
    "examples/scripts/compare_logits.py": "the starting process does not load torch; its ranks do",
    "examples/scripts/labelled_data.py": "Pillow is an extra",
    "examples/scripts/small_llama.py": "`--help` does not wait for transformers",
    "examples/scripts/key_tokens.py": "a declaration imports torch only when it is trained",
    "examples/scripts/own_data.py": "megaloom.runtime prepares megatron-core, and datasets takes seconds",
    "examples/scripts/own_loss.py": "a declaration imports torch only when it is trained",
    "examples/scripts/own_steps.py": "a declaration imports torch only when it is trained",
    "examples/scripts/distil.py": "a declaration imports torch only when it is trained",
    "examples/scripts/dpo.py": "a declaration imports torch only when it is trained",
    "examples/scripts/pretrain_gpt2.py": "megaloom.runtime prepares megatron-core",
    "examples/scripts/reward.py": "a declaration imports torch only when it is trained",
    "examples/scripts/t5_over_stages.py": "the starting process does not load torch; its ranks do",
    "examples/own_module.py": "a declaration imports torch only when it is trained",
}


def test_imports_inside_functions_have_a_reason() -> None:
    results = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))
    }
    assert results == REASONS.keys()
