from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    RAW: _ClassVar[Encoding]
    SHUFFLED: _ClassVar[Encoding]
    CODEC: _ClassVar[Encoding]

ENCODING_UNSPECIFIED: Encoding
RAW: Encoding
SHUFFLED: Encoding
CODEC: Encoding

class Envelope(_message.Message):
    __slots__ = ("version", "model", "fingerprint", "kv_scheme", "block_size", "metadata", "tokens", "tensors")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_SCHEME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    version: int
    model: str
    fingerprint: str
    kv_scheme: str
    block_size: int
    metadata: _containers.ScalarMap[str, str]
    tokens: Array
    tensors: _containers.RepeatedCompositeFieldContainer[Array]
    def __init__(
        self,
        version: _Optional[int] = ...,
        model: _Optional[str] = ...,
        fingerprint: _Optional[str] = ...,
        kv_scheme: _Optional[str] = ...,
        block_size: _Optional[int] = ...,
        metadata: _Optional[_Mapping[str, str]] = ...,
        tokens: _Optional[_Union[Array, _Mapping]] = ...,
        tensors: _Optional[_Iterable[_Union[Array, _Mapping]]] = ...,
    ) -> None: ...

class Array(_message.Message):
    __slots__ = ("name", "dtype", "shape", "encoding", "compressed_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    encoding: Encoding
    compressed_bytes: int
    def __init__(
        self,
        name: _Optional[str] = ...,
        dtype: _Optional[str] = ...,
        shape: _Optional[_Iterable[int]] = ...,
        encoding: _Optional[_Union[Encoding, str]] = ...,
        compressed_bytes: _Optional[int] = ...,
    ) -> None: ...
