"""Published training runs: records, predictions, and scores of the cost model."""
