"""The recipe that ZooKeeper and etcd share: an ordered line of nodes on the server, each of which ends with its session."""
