"""The parts that ZooKeeper and etcd share: a queue of holders and waiters on the server, each bound to a session."""
