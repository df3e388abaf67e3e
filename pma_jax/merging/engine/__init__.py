"""The merge engine: from storage to storage, out of core."""
