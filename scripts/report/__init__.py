"""The page that lays the runs over each other: read the results, compare them, say what came out, write one file."""
