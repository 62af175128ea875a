"""Says that it is busy and then is, for a minute: a job to be killed."""

import time

print("busy", flush=True)
time.sleep(60)
