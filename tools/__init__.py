"""The offline tools, installed as `powerinfer_py.tools`: one module per verb of the `powerinfer` command."""
