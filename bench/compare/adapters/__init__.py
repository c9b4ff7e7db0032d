"""Other software as one end of a baseline, a module each (`kvxfer.bench.compare.end.Software`)."""
