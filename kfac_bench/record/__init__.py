"""What a run leaves and what is computed from it: events, runs, scores, series, and live views."""
