"""How the parameters of a rank lie, and who writes their gradients; one small file per role."""
