"""What several tests share: small data sets and runs, jobs, and servers."""
