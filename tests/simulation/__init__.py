"""The engine in simulated processes: one seed decides the order of threads, the network, the clocks and the faults."""
