BUILTIN = settings["model"]["source"] == "builtin"
MODEL_MODULE = "scripts.prepare.demo_model" if BUILTIN else "scripts.prepare.model"
MODEL_SETTINGS = (
    {**settings["model"], "instruction": settings["prompt"]["instruction"]}
    if BUILTIN
    else without(settings["model"], "warm_start_steps", "careless_share", "seed")
)


# Downloads the model, links a local one, or builds the demo's; model.json lists its files with their checksums.
rule model:
    input:
        local=local_files(settings["model"]),
        sources=imported_sources(MODEL_MODULE),
    output:
        record=f"{MODEL}/model.json",
    log:
        "logs/model.log",
    benchmark:
        "logs/benchmarks/model.tsv"
    resources:
        gpu=int(BUILTIN),  # the demo's is trained; a download needs none
        gpu_stage=int(BUILTIN),
    params:
        module=MODEL_MODULE,
        settings=as_param(MODEL_SETTINGS),
        folder=MODEL,
    shell:
        r"""
        exec &> >(tee {log:q})
        {PYTHON:q} -m {params.module} \
            --settings {params.settings:q} \
            --out {params.folder:q}
        """
