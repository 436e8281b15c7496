"""What paged memory saves and costs: runs the engine in this process, unlike the load test."""
