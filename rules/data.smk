DATA_SETTINGS = (
    without(settings["data"], "expected_rows")
    if settings["data"]["source"] == "builtin"
    else without(settings["data"], "train_rows", "test_rows")
)


# GSM8K, or problems generated in its form, as train, validation and test.
rule data:
    input:
        local=local_files(settings["data"]),
        sources=imported_sources("scripts.prepare.data"),
    output:
        train=f"{DATA}/train.jsonl",
        validation=f"{DATA}/validation.jsonl",
        test=f"{DATA}/test.jsonl",
        record=f"{DATA}/data.json",
    log:
        "logs/data.log",
    benchmark:
        "logs/benchmarks/data.tsv"
    params:
        settings=as_param(DATA_SETTINGS),
        folder=DATA,
    shell:
        r"""
        exec &> >(tee {log:q})
        {PYTHON:q} -m scripts.prepare.data \
            --settings {params.settings:q} \
            --out {params.folder:q}
        """
