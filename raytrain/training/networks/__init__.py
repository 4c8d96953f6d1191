"""Networks: built, loaded, transferred, compiled and averaged, in a precision that suits the device; their loss."""
