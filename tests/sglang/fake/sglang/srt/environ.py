"""Where SGLang's own list of its variables is."""
import os

inbalance_check = os.environ.get("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "1")
host_ip = os.environ.get("SGLANG_HOST_IP")
