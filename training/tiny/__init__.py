"""Scripts that rebuild the bundled models from named package versions.

Order: `build_corpus`, `build_tokenizer`, `pack`, `train_target`, `regenerate`, `train_dflash`, `evaluate`. Each is a
small command line (`python -m training.tiny.NAME --help`).
"""
