"""Preparation: a checked model in models/<id>/ and checked questions in data/<id>/, whatever the source."""
