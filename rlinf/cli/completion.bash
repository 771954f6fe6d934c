# Completion of rlinf: passes it the line up to the cursor. If it prints nothing, the shell completes file names itself.
_rlinf() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\n'
  local word="${line##* }"
  local kept="${word%"${word##*[$COMP_WORDBREAKS]}"}"  # readline replaces only the text after the last "="
  COMPREPLY=($("$1" --complete "$line" 2>/dev/null))
  COMPREPLY=("${COMPREPLY[@]#"$kept"}")
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o default -F _rlinf rlinf
