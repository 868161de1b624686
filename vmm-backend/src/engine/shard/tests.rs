//! Deterministic tests of one shard against a scripted world.
