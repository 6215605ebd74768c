"""The results of runs: their events, scores and curves, and live views of them."""
