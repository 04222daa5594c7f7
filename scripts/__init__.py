"""Scripts of the pipeline; run as `python -m scripts.<name>` from the project root."""
