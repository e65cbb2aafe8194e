"""How near steps come to what the machine can do: plans of splitc beside DDP and scripts written by hand, in pairs."""
