"""Results: kept, judged, shown."""
