# Greedy answers to the whole test set: of the untrained model (baseline) and of every run.
rule evaluate:
    input:
        model=evaluated_model,
        test=f"{DATA}/test.jsonl",
        sources=imported_sources("scripts.evaluate"),
    output:
        result=report(
            "results/{run}/eval.json",
            caption="../reports/captions/evaluation.rst",
            category="Evaluation",
            labels={"run": "{run}", "file": "accuracy"},
        ),
        samples="results/{run}/samples.jsonl",
    log:
        "logs/evaluate_{run}.log",
    benchmark:
        "logs/benchmarks/evaluate_{run}.tsv"
    resources:
        gpu=1,
        gpu_stage=1,
    params:
        settings=as_param(evaluation_settings),
        model=lambda wildcards, input: Path(input.model).parent,
        data=DATA,
    shell:
        r"""
        exec &> >(tee {log:q})
        {PYTHON:q} -m scripts.evaluate \
            --run {wildcards.run:q} \
            --settings {params.settings:q} \
            --model {params.model:q} \
            --data {params.data:q} \
            --out results/{wildcards.run:q}
        """
