"""``kfac-data``: data in their real layouts, made, verified and prepared."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser, say
from kfac_bench.counted import counted
from kfac_bench.errors import printable


def data(arguments: list[str]) -> int:
    """Parse and run; the exit code."""
    from kfac_bench.data.demo import demo_folder

    parser = Parser(prog="kfac-data", description="Make demo data, verify data on disk.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    make = commands.add_parser("make-demo", help="write a small demo in a data set's real layout")
    make.add_argument("layout", choices=demo_folder.LAYOUTS)
    verify = commands.add_parser("verify", help="read every file; exit code 1 if one is damaged")
    prepare = commands.add_parser("prepare", help="make of a published data set what is trained on")
    prepare.add_argument("layout", choices=("shards", "wikipedia", "wikitext", "text"))
    prepare.add_argument("--source", type=Path, required=True, help="ImageNet's folders, or text")
    for command in (make, verify, prepare):
        command.add_argument("folder", type=Path)
    prepare.add_argument("--vocab-file", type=Path, help="vocab.txt to use, instead of a new one")
    prepare.add_argument("--vocab-size", type=int, default=30522, help="of a new one (30522)")
    prepare.add_argument("--sequence-length", type=int, nargs="+", default=[128], help="128, 512")
    prepare.add_argument("--eval-share", type=float, default=0.01, help="documents held out (0.01)")
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        return _prepare(options)
    if options.command == "make-demo":
        demo_folder.make(options.layout, options.folder)
        print(f"{options.folder}: made")
        return 0
    from kfac_bench.data.verify import verify as check

    found, faults = check(options.folder)
    for path, fault in faults:
        print(printable(f"{path}: {fault}"))
    print(f"{found}; {counted(len(faults), 'fault', none='no')}")
    return 1 if faults else 0


def _prepare(options: argparse.Namespace) -> int:
    if options.layout == "shards":
        from kfac_bench.data.images import tar_shards

        for line in tar_shards.write(options.folder, options.source):
            say(line)
        return 0
    from functools import partial

    from kfac_bench.data.language import documents
    from kfac_bench.data.language import prepare as preparation

    preparation.prepare(
        partial(documents.read, options.layout, options.source),
        options.folder,
        vocabulary_file=options.vocab_file,
        vocabulary_size=options.vocab_size,
        sequence_lengths=options.sequence_length,
        eval_share=options.eval_share,
        about=f"{options.layout}: {options.source}",
        say=say,
    )
    print(f"{options.folder}: made")
    return 0
