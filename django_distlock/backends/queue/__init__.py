"""The recipe that ZooKeeper and etcd share: a queue of nodes on the server, each of which ends with its session."""
