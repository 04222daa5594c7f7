# One training run, by hand or with TRL as config.yaml's runs: say.
rule train:
    input:
        model=f"{MODEL}/model.json",
        train=f"{DATA}/train.jsonl",
        validation=f"{DATA}/validation.jsonl",
        record=f"{DATA}/data.json",
        sources=trainer_sources,
    output:
        metrics=report(
            "results/{run}/metrics.csv",
            caption="../reports/captions/metrics.rst",
            category="Training",
            labels={"run": "{run}", "file": "metrics"},
        ),
        manifest=report(
            "results/{run}/manifest.json",
            caption="../reports/captions/manifest.rst",
            category="Training",
            labels={"run": "{run}", "file": "manifest"},
        ),
        model="results/{run}/model/model.json",
    log:
        "logs/train_{run}.log",
    benchmark:
        "logs/benchmarks/train_{run}.tsv"
    resources:
        gpu=processes,
        gpu_stage=1,
    params:
        start=start_trainer,
        settings=run_settings,
        model=MODEL,
        data=DATA,
    shell:
        r"""
        # Whoever stops the run stops the training, which still has a step to end and to log.
        exec &> >(
            trap "" INT TERM
            exec tee {log:q}
        )
        {PYTHON:q} -m {params.start} \
            --run {wildcards.run:q} \
            --settings {params.settings:q} \
            --model {params.model:q} \
            --data {params.data:q} \
            --out results/{wildcards.run:q} \
            --tracking {settings[tracking]:q} \
            --checkpoint-every {settings[checkpoint_every]}
        # The clock may have been set back meanwhile: Snakemake drops results that are older than their inputs.
        find {input:q} -newermt now -exec touch {{}} + || true
        """


# Ten steps of each trainer and hard checks on them, before a long run.
rule smoke:
    input:
        metrics=expand("results/smoke-{trainer}/metrics.csv", trainer=TRAINERS),
        manifests=expand("results/smoke-{trainer}/manifest.json", trainer=TRAINERS),
        sources=imported_sources("scripts.smoke"),
    output:
        "results/smoke.json",
    log:
        "logs/smoke.log",
    benchmark:
        "logs/benchmarks/smoke.tsv"
    shell:
        r"""
        exec &> >(tee {log:q})
        {PYTHON:q} -m scripts.smoke {input.metrics:q} --out {output:q}
        """
