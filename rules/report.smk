# The page of a run, overlaid with report.runs.
rule page:
    input:
        baseline=["results/baseline/eval.json", "results/baseline/samples.jsonl"],
        metrics=lambda wildcards: expand("results/{run}/metrics.csv", run=overlaid_runs(wildcards)),
        manifests=lambda wildcards: expand("results/{run}/manifest.json", run=overlaid_runs(wildcards)),
        evals=lambda wildcards: expand("results/{run}/eval.json", run=overlaid_runs(wildcards)),
        samples=lambda wildcards: expand("results/{run}/samples.jsonl", run=overlaid_runs(wildcards)),
        template=sorted(
            f"reports/{path.name}"
            for path in (ROOT / "reports").iterdir()
            if path.suffix in (".j2", ".css", ".js", ".toml")
        ),
        sources=imported_sources("scripts.report"),
    output:
        page=report(
            "results/{run}/report.html",
            caption="../reports/captions/page.rst",
            category="Page",
            labels={"run": "{run}", "file": "page"},
        ),
    log:
        "logs/page_{run}.log",
    benchmark:
        "logs/benchmarks/page_{run}.tsv"
    params:
        settings=as_param({**settings["report"], "scale": settings["scale"]}),
        runs=overlaid_runs,
    shell:
        r"""
        exec &> >(tee {log:q})
        {PYTHON:q} -m scripts.report \
            --run {wildcards.run:q} \
            --runs {params.runs:q} \
            --settings {params.settings:q} \
            --results results \
            --out {output.page:q}
        """
