"""What a replay needs beside snapshots: tensors that have crossed pipeline stages (MoEvement, section 3.4)."""
